// As step.c, in Java: each step is done by a pool's thread, with garbage for the collector.
import java.math.BigInteger;
import java.security.SecureRandom;
import java.util.ArrayList;
import java.util.concurrent.Executors;

public class Steps {
    static long value;
    static double sum;

    public static void main(String[] arguments) throws Exception {
        int steps = Integer.parseInt(arguments[0]);
        long nonce = new SecureRandom().nextLong();
        value = nonce;
        var pool = Executors.newFixedThreadPool(8);
        for (int i = 1; i <= steps; i++) {
            int step = i;
            pool.submit(() -> {
                var garbage = new ArrayList<byte[]>();
                for (int j = 0; j < 50; j++) garbage.add(new byte[4096]);
                sum += 1.0 / step;
                value = value * 6364136223846793005L + garbage.size() / 50;
                System.out.println(String.format("%016x %d %s %016x", nonce, step, sum, value));
                System.out.flush();
                return 0;
            }).get();
            Thread.sleep(2);
        }
        System.exit(7);
    }
}
