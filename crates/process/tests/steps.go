// As step.c, in Go: each step is done by another goroutine, with garbage for the collector.
package main

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"time"
)

func main() {
	steps, _ := strconv.Atoi(os.Args[1])
	var bytes [8]byte
	rand.Read(bytes[:])
	nonce := binary.LittleEndian.Uint64(bytes[:])
	value, sum := nonce, 0.0
	const count = 16
	var turns [count]chan int
	done := make(chan bool)
	for i := range turns {
		turns[i] = make(chan int)
	}
	for i := range turns {
		go func() {
			for step := range turns[i] {
				garbage := make([][]byte, 0)
				for j := 0; j < 50; j++ {
					garbage = append(garbage, make([]byte, 4096))
				}
				sum += 1.0 / float64(step)
				value = value*6364136223846793005 + uint64(len(garbage))/50
				text := strconv.FormatFloat(sum, 'g', -1, 64)
				fmt.Printf("%016x %d %s %016x\n", nonce, step, text, value)
				time.Sleep(2 * time.Millisecond)
				done <- true
			}
		}()
	}
	for step := 1; step <= steps; step++ {
		turns[step%count] <- step
		<-done
	}
	os.Exit(7)
}
