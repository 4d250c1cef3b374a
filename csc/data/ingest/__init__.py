"""From annotations and images to a data set."""
