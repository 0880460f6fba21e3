"""Files at URLs: listing, parallel requests, opening of blocks, and upload."""
