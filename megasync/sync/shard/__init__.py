"""The p2p transport: each trainer rank sends each engine rank the rectangles that it holds, without gathering."""
