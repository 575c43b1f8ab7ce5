"""The command line: one file a command, each parses, builds a config and calls. No logic here."""
