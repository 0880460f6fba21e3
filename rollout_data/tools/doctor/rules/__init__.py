"""The functions of the rules, one module for each group, and the scripts that change values."""
