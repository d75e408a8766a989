"""The lab: slow links, several ranks on one GPU, benchmarks."""
