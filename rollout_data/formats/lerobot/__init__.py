"""LeRobot datasets: their description, their index, their rows; and writing them."""
