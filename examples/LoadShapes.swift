// Compiles and loads all shapes of a mounted model at once, and times it.
//
//     swiftc -O -parse-as-library examples/LoadShapes.swift -o load_shapes
//     ./load_shapes /mnt/w/coreml/NAME/TAG
//
// Core ML copies a package's weights when it compiles one; all copies are made from the same cached pages.

import CoreML
import Foundation

@main
struct LoadShapes {
    static func main() async throws {
        guard CommandLine.arguments.count == 2 else {
            print("usage: load_shapes DIRECTORY")
            exit(2)
        }
        let directory = URL(fileURLWithPath: CommandLine.arguments[1], isDirectory: true)
        let packages = try FileManager.default.contentsOfDirectory(at: directory, includingPropertiesForKeys: nil)
            .filter { $0.pathExtension == "mlpackage" && $0.lastPathComponent != "all.mlpackage" }
            .sorted { $0.lastPathComponent < $1.lastPathComponent }
        let clock = ContinuousClock()
        let start = clock.now
        try await withThrowingTaskGroup(of: (String, Duration).self) { group in
            for package in packages {
                group.addTask {
                    let start = clock.now
                    let compiled = try await MLModel.compileModel(at: package)
                    defer { try? FileManager.default.removeItem(at: compiled) }
                    _ = try await MLModel.load(contentsOf: compiled, configuration: MLModelConfiguration())
                    return (package.lastPathComponent, clock.now - start)
                }
            }
            for try await (name, time) in group {
                print("\(name): \(time)")
            }
        }
        print("\(packages.count) shapes at once: \(clock.now - start)")
    }
}
