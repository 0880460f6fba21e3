"""Sources of episodes: folders, files and memory behind one interface, `EpisodeSource`."""
