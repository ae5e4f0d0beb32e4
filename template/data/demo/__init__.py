"""The demo data set, made on first use from data/shipped."""
