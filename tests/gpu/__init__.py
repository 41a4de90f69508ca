"""What only a GPU can show: `make test-gpu`, ten minutes on one GPU, and nothing is downloaded."""
