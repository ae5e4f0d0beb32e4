"""The parts of doctor.py: what a rank sees, what ranks tell each other, what is wrong."""
