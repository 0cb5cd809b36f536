"""The MTP head that ships inside the checkpoint."""
