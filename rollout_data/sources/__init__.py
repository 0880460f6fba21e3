"""The places that episodes come from, through one interface: `EpisodeSource`."""
