"""Commands besides training: a module each, main(argv) -> exit code; hvdkit/cli.py lists all."""
