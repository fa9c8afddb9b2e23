"""Published weights in and out: the names, shapes and files of Hugging Face's model hub."""
