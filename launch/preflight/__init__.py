"""What doctor.py is made of: one job a file, nothing of the project's imported."""
