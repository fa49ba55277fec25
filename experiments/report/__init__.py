"""Reports: build one self-contained offline HTML page from run directories."""
