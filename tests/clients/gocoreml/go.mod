module wmount/tests/gocoreml

go 1.25.5

require github.com/gomlx/go-coreml v0.0.0-20260109045350-0b720b1b4a65

require (
	github.com/google/uuid v1.6.0 // indirect
	google.golang.org/protobuf v1.36.11 // indirect
)
