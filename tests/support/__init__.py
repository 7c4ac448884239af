"""What tests share, one package for each area; nothing here is collected by pytest."""
