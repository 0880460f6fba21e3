"""Check functions of the rules, with one module per group of rules, and change scripts."""
