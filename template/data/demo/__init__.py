"""The demo data set, made on first use from what scikit-learn ships."""
