"""Files behind a network: how they are listed, fetched by parallel requests, opened and published."""
