"""Jobs that turn the rows of files into rows of another file: generating answers, and scoring them."""
