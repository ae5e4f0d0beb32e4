"""Networks of papers, to train from scratch or from published weights."""
