"""Files that we write, read by the other systems' own classes; `make test-readers` installs each in an environment."""
