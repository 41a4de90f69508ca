"""The data and models of the course."""
