// Writes packages of three shapes with go-coreml's own serializer, all constants in the program:
//
//	go run . DIRECTORY
package main

import (
	"fmt"
	"math/rand"
	"os"

	"github.com/gomlx/go-coreml/model"
)

func data(seed int64, n int) []float32 {
	r := rand.New(rand.NewSource(seed))
	d := make([]float32, n)
	for i := range d {
		d[i] = float32(r.NormFloat64())
	}
	return d
}

func main() {
	out := os.Args[1]
	for _, n := range []int64{4, 8, 16} {
		b := model.NewBuilder("main")
		x := b.Input("x", model.Float32, n, 64)
		for i := 0; i < 6; i++ {
			w := b.Const(fmt.Sprintf("w%d", i), model.Float32, []int64{64, 64}, data(int64(i), 64*64))
			c := b.Const(fmt.Sprintf("c%d", i), model.Float32, []int64{64, 64}, data(int64(100+i), 64*64))
			x = b.MatMul(x, b.MatMul(w, c))
		}
		b.Output("y", x)
		in := []model.FeatureSpec{{Name: "x", DType: model.Float32, Shape: []int64{n, 64}}}
		o := []model.FeatureSpec{{Name: "y", DType: model.Float32, Shape: []int64{n, 64}}}
		m := model.ToModel(b.Build(), in, o, model.DefaultOptions())
		if err := model.SaveMLPackage(m, fmt.Sprintf("%s/go-%d.mlpackage", out, n)); err != nil {
			panic(err)
		}
	}
}
