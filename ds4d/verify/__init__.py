"""``ds4d verify``: a file's layout on a small copy of its model, against one plain process."""
