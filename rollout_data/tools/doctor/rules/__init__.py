"""The rules, a file for each group: what to look for, and in which table its rows stand."""
