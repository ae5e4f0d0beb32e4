"""The demo data set, made on first use from hvdkit/data/shipped."""
