"""The train_on_nodes component."""
