"""Several processes, on one node or several, that train or score as one."""
