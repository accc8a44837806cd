"""Sources of messages and publishers: one file or package for each broker, which imports no other."""
