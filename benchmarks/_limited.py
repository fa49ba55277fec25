limited_rows = None
