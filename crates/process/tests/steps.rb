# As step.c, in Ruby: the value goes through a child and two pipes, and a heap whose pages lie apart from each other.
steps = ARGV[0].to_i
nonce = File.binread('/dev/urandom', 8).unpack1('Q')
value, sum = nonce, 0.0
heap = Array.new(200_000) { |i| "number #{i}" * (1 + i % 7) }
heap.each_index { |i| heap[i] = nil unless (i % 16).zero? }
program = '$stdout.sync = true; while (line = $stdin.gets); puts((line.to_i * 6364136223846793005 + 1) & (2**64 - 1)); end'
child = IO.popen(['ruby', '-e', program], 'r+')
child.sync = $stdout.sync = true
(1..steps).each do |step|
  child.puts value
  value = child.gets.to_i
  sum += 1.0 / step
  bad = (0...heap.size).step(16).find { |i| heap[i] != "number #{i}" * (1 + i % 7) } if (step % 50).zero?
  abort "wrong: #{bad}" if bad
  puts format('%016x %d %.17g %016x', nonce, step, sum, value)
  sleep 0.002
end
child.close
exit 7
