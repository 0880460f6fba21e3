"""One HTML page that shows what a recording holds, what the doctor found in it, and the episodes concerned."""
