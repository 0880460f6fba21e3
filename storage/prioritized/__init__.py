"""Priorities of rows, draws by priority, and limits of age and use. Stores no rows."""
