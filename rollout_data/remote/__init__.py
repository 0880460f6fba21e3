"""Access to files at URLs: listing, parallel requests, reading of blocks, and upload."""
