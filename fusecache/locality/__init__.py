"""What this node can serve by itself, measured, and told to the controller."""
