"""The playground: one page that trains two networks in the browser, made of the files here."""
