"""What crosses between the notebook and a rank. Imports nothing of labkit but `system`."""
