% As step.c. Octave's integers saturate: four digits of base 65536, the lowest first.
1;
function digits = carried(digits)
  for i = 1:4
    if i < 4
      digits(i + 1) += floor(digits(i) / 65536);
    end
    digits(i) = mod(digits(i), 65536);
  end
end
function next = following(digits)
  factor = [hex2dec("7f2d"), hex2dec("4c95"), hex2dec("f42d"), hex2dec("5851")];
  product = [1, 0, 0, 0];
  for i = 1:4
    for j = 1:(5 - i)
      product(i + j - 1) += digits(i) * factor(j);
    end
  end
  next = carried(product);
end
function text = word(digits)
  text = sprintf("%04x", fliplr(digits));
end
arguments = argv();
steps = str2num(arguments{end});
source = fopen("/dev/urandom", "r");
nonce = double(fread(source, 4, "uint16"))';
fclose(source);
value = nonce;
total = 0;
for step = 1:steps
  total += 1 / step;
  value = following(value);
  printf("%s %d %.17g %s\n", word(nonce), step, total, word(value));
  fflush(stdout);
  pause(0.002);
end
exit(7);
