"""The functions of the rules, a file for each group, and the scripts that change values."""
