"""Breakpoints and questions on a rank: Python's debugger, `input` and `getpass`, answered from the notebook."""
