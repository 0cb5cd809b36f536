"""`pilotfish audit`: what is asked, how it runs, what is compared, what is said of it."""
