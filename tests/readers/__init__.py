"""The classes of other systems read files that we write. `make test-readers` installs each in an environment."""
