"""What crosses between the notebook and a rank. Imports nothing of labkit but `system`."""

VERSION = "0.1.0"
"""`labkit.__version__`, and what pyproject.toml says."""
