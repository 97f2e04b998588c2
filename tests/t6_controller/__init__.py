"""The controller: its rules alone, its parts against a double of the Kubernetes API, and the whole process."""
