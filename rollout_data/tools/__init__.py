"""Tools on recordings: the command line, the doctor, editing, the report."""
