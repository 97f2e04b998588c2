"""The same statements about the embedded server and about real Alluxio servers."""
