# As step.c, in Perl: the value goes through a child and two pipes.
use strict; use warnings; use IPC::Open2; use Time::HiRes 'usleep'; use integer;
my $steps = $ARGV[0];
open(my $random, '<', '/dev/urandom'); sysread($random, my $bytes, 8); close($random);
my $nonce = unpack('q', $bytes);
my $value = $nonce;
my $sum = 0;
my $child = open2(my $from, my $to, $^X, '-e', 'use integer; $| = 1; while (<STDIN>) { print $_ * 6364136223846793005 + 1, "\n" }');
$| = 1;
for my $step (1 .. $steps) {
    print $to "$value\n";
    $value = <$from> + 0;
    { no integer; $sum += 1 / $step; }
    printf("%016x %d %.17g %016x\n", $nonce, $step, $sum, $value);
    usleep(2000);
}
close($to); waitpid($child, 0);
exit 7;
