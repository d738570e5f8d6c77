//! MD2 (RFC 1319) and HMAC (RFC 2104) over it with a 16-byte block: what the runtime's start-up
//! handshake is made of. Broken as cryptography, and used for nothing else here.

const BLOCK: usize = 16;

/// The permutation that RFC 1319 takes from the digits of pi.
#[rustfmt::skip]
const PI: [u8; 256] = [
     41,  46,  67, 201, 162, 216, 124,   1,  61,  54,  84, 161, 236, 240,   6,  19,
     98, 167,   5, 243, 192, 199, 115, 140, 152, 147,  43, 217, 188,  76, 130, 202,
     30, 155,  87,  60, 253, 212, 224,  22, 103,  66, 111,  24, 138,  23, 229,  18,
    190,  78, 196, 214, 218, 158, 222,  73, 160, 251, 245, 142, 187,  47, 238, 122,
    169, 104, 121, 145,  21, 178,   7,  63, 148, 194,  16, 137,  11,  34,  95,  33,
    128, 127,  93, 154,  90, 144,  50,  39,  53,  62, 204, 231, 191, 247, 151,   3,
    255,  25,  48, 179,  72, 165, 181, 209, 215,  94, 146,  42, 172,  86, 170, 198,
     79, 184,  56, 210, 150, 164, 125, 182, 118, 252, 107, 226, 156, 116,   4, 241,
     69, 157, 112,  89, 100, 113, 135,  32, 134,  91, 207, 101, 230,  45, 168,   2,
     27,  96,  37, 173, 174, 176, 185, 246,  28,  70,  97, 105,  52,  64, 126,  15,
     85,  71, 163,  35, 221,  81, 175,  58, 195,  92, 249, 206, 186, 197, 234,  38,
     44,  83,  13, 110, 133,  40, 132,   9, 211, 223, 205, 244,  65, 129,  77,  82,
    106, 220,  55, 200, 108, 193, 171, 250,  36, 225, 123,   8,  12, 189, 177,  74,
    120, 136, 149, 139, 227,  99, 232, 109, 233, 203, 213, 254,  59,   0,  29,  57,
    242, 239, 183,  14, 102,  88, 208, 228, 166, 119, 114, 248, 235, 117,  75,  10,
     49,  68,  80, 180, 143, 237,  31,  26, 219, 153, 141,  51, 159,  17, 131,  20,];

/// The MD2 digest of `parts`, one after another.
pub(super) fn md2(parts: &[&[u8]]) -> [u8; BLOCK] {
    let mut message: Vec<u8> = parts.concat();
    let padding = BLOCK - message.len() % BLOCK;
    message.extend(std::iter::repeat_n(padding as u8, padding));
    let checksum = checksum(&message);
    message.extend(checksum);

    let mut state = [0u8; 3 * BLOCK];
    for block in message.chunks_exact(BLOCK) {
        for (i, &byte) in block.iter().enumerate() {
            state[BLOCK + i] = byte;
            state[2 * BLOCK + i] = byte ^ state[i];
        }
        let mut t = 0u8;
        for round in 0..18 {
            for byte in &mut state {
                *byte ^= PI[t as usize];
                t = *byte;
            }
            t = t.wrapping_add(round);
        }
    }
    let mut digest = [0; BLOCK];
    digest.copy_from_slice(&state[..BLOCK]);
    digest
}

fn checksum(message: &[u8]) -> [u8; BLOCK] {
    let mut sum = [0u8; BLOCK];
    let mut last = 0;
    for block in message.chunks_exact(BLOCK) {
        for (sum, &byte) in sum.iter_mut().zip(block) {
            *sum ^= PI[(byte ^ last) as usize];
            last = *sum;
        }
    }
    sum
}

/// HMAC of `message` under a key of one block.
pub(super) fn hmac_md2(key: &[u8; BLOCK], message: &[u8]) -> [u8; BLOCK] {
    let inner = md2(&[&key.map(|byte| byte ^ 0x36), message]);
    md2(&[&key.map(|byte| byte ^ 0x5c), &inner])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn rfc_1319_vectors() {
        for (text, digest) in [
            ("", "8350e5a3e24c153df2275c9f80692773"),
            ("a", "32ec01ec4a6dac72c0ab96fb34c0b5d1"),
            ("abc", "da853b0d3f88d99b30283a69e6ded6bb"),
            ("message digest", "ab4f496bfb2a530b219ff33031fe06b0"),
            ("abcdefghijklmnopqrstuvwxyz", "4e8ddff3650292ab5a4108c3aa47940b"),
            (
                "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789",
                "da33def2a42df13975352846c30338cd",
            ),
            (
                "12345678901234567890123456789012345678901234567890123456789012345678901234567890",
                "d5976f79d83d3a0dc9806c3c66f3efd8",
            ),
        ] {
            assert_eq!(hex(&md2(&[text.as_bytes()])), digest, "{text}");
        }
    }

    /// Values of another implementation (pycryptodome's MD2, HMAC written from RFC 2104).
    #[test]
    fn hmac_vectors() {
        let mut key = [0; BLOCK];
        key[..3].copy_from_slice(b"key");
        let code = hmac_md2(&key, b"The quick brown fox");
        assert_eq!(hex(&code), "7533ee1790955a417a36c34e987bf33f");
        let key: [u8; BLOCK] = std::array::from_fn(|i| i as u8);
        let message: Vec<u8> = (0..100).collect();
        assert_eq!(hex(&hmac_md2(&key, &message)), "7a87dca6bb830b4a08448eff41a9e695");
    }
}
