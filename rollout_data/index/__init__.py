"""Which frames exist, where they are, which process reads them."""
